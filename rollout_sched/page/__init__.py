"""Makes pages for a browser, each one file without external resources; `assets` draws them."""
