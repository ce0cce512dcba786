"""Every claim as a study that anyone can run: ``python -m studies``. Not part of the installed package."""
