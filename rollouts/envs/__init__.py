"""Making, checking, guarding and saving environments."""
