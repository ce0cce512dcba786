"""Parts of examples/point_clouds.py: grouping.py, data.py (readers), models.py (Point-BERT, Pix4Point)."""
