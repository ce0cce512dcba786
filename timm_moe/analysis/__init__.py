"""What a trained model does: accuracy, calibration, diversity, routes; and what the papers say of it."""
