"""Result files as columns, groups of runs, and statistics over them. No Streamlit, no Plotly."""
