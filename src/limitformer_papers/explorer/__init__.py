"""Numbers of the explorer's pages: grids of laws, computed once and written as JSON next to the pages
(docs/explorer).
"""
