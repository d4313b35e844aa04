"""Groups that come finished from outside while the run goes on (``data.source: pushed``)."""
