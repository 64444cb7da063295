"""Pictures of layouts: a descriptor in words, as text for a terminal and as SVG.

Must not know about terminals, files or graphs.
"""
