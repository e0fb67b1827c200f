"""Every private torch name that the runtime half touches, by subsystem, with the versions it was seen in."""
