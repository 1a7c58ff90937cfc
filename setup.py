"""Everything is in setup.cfg; this file is for tools that still look for it."""

from setuptools import setup

setup()
