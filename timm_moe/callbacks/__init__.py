"""Around a training run: averaging during, export after."""
