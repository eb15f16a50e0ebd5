"""Pages for a browser, each one file that needs no network: what they hold; assets draw it."""
