"""Source formats: one module a format reads files as published, checks them and yields `prm.records`."""
