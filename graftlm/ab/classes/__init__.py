"""Each framework's own classes for the engines that `graftlm ab` knows by name."""
