"""Dashboards of results: the live page of `polopt dashboard`, and `polopt report`.

The page and the report read the files that Tune writes. The package also writes Grafana dashboards,
and a layout for TensorBoard. Except for `tensorboard.py`, which is a callback of Tune, its modules
import neither Ray nor torch. The extra `polopt[dashboard]` installs Streamlit and Plotly. The
modules in `data/`, which read results and compute statistics, do not import these two libraries.
"""
