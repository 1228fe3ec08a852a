"""The broker passes frames on, so that everybody needs just one address. It imports no torch and opens no payload."""
