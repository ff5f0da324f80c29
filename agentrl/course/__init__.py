# Generated from chapters/*.ipynb by tools/export.py. Do not edit: edit the notebook.
"""What the chapters run on and no trainer imports."""
