"""A transport on which a script decides which answer arrives next, on a virtual clock."""
