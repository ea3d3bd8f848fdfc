"""What the explorer's pages show: grids of laws, computed once and written as JSON beside the pages (docs/explorer)."""
