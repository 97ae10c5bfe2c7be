"""The sides of comparisons: functions that run in processes of their own (`edgekv_lab.process`),
with the unpatched library or with edgekv. They import little, since the memory of their processes
is measured.
"""
