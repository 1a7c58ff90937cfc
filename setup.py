"""The configuration is in setup.cfg; this file is for tools that need a setup.py."""

from setuptools import setup

setup()
