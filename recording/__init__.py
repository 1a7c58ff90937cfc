"""The record of the order of arrival in a run, and the rerun from this record."""
