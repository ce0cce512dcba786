"""What ``timm-moe routes`` shows: counts of choices, mixtures, classes of patches, and their files."""
