"""Functions that turn a selection of runs into Plotly figures, tables and lists of findings."""
