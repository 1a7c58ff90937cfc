"""Pure functions that turn a selection of runs into Plotly figures and tables."""
