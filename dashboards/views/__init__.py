"""Views: pure functions from a selection of runs to Plotly figures and tables."""
