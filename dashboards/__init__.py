"""Views of result files: the live page of `polopt dashboard` and the file of `polopt report`.

Reads what Tune writes and imports neither Ray nor torch. Streamlit and Plotly come with the extra
`polopt[dashboard]`. The modules that read results and compute statistics do without them.
"""
