// Versions of the site beside this one; docs/versions.py writes this file where sites of several versions are kept.
window.SITE_VERSIONS = [];
