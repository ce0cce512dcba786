"""Training by other libraries: each has a module here, the only one that changes its objects."""
