"""Dashboards of result files: the live page of `polopt dashboard`, and `polopt report`.

This package reads the files that Tune writes. Except for `tensorboard.py`, which is a callback of
Tune, its modules import neither Ray nor torch. The extra `polopt[dashboard]` installs Streamlit and
Plotly. The modules in `data/`, which read results and compute statistics, do not need these two
libraries.
"""
