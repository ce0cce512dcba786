"""What examples/point_clouds.py is made of: grouping.py, data.py (readers), models.py (Point-BERT, Pix4Point)."""
