"""Ground floor: device code, one op a file. Imports nothing of this project."""
