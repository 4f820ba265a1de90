"""Tests of the model room."""
