"""The gradient noise scale: what is measured of an update, and kept."""
