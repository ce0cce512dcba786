"""The contents of ``timm-moe routes``: counts of choices, mixtures, classes of patches, and their files."""
