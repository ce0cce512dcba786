"""The sections of a report: measurements as sentences, charts, tables and images for the page."""
