"""Sample and verify: engines that draw responses, verifiers that judge them."""
