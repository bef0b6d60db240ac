"""Pictures as SVG text: the one place of colours and shapes, for notebooks, reports and documents.

It knows numbers and names only, so that the algebra above it can draw itself. Text and lines take the page's own colour
(`currentColor`), fills are half transparent: the pictures are readable on light and dark pages without a script.
"""
