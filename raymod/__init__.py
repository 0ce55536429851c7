"""Run the transformer of a diffusers pipeline split over a gang of Ray actors."""

__version__ = "0.1.0"
