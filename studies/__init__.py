"""Studies that anyone can run: ``python -m studies``. Not part of the installed package."""
