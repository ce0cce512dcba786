"""Whose training run it is: a module for each library, the only one that changes objects of that library."""
