"""The contents of ``timm-moe routes``.

They are counts of choices, mixtures, classes of patches, and the files with these.
"""
