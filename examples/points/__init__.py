"""Parts of examples/point_clouds.py.

They are grouping.py, data.py (readers) and models.py (Point-BERT, Pix4Point).
"""
