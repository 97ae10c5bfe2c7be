"""A server of many models: each is a server of its own, a child, in a process of its own. The
router starts them when they are asked for, hands requests on, and ends those that nobody uses.
"""
