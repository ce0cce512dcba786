"""Measurements on a trained model: accuracy, calibration, diversity, few-shot learning, routing."""
