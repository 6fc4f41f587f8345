"""From logits to tokens, on the host and on the device.

Every step samples here once. Rows without host-only options stay on the device. A token mask costs one copy of
num_words int32 to the device, a row with host-only options one copy of its logits to the host.
"""
