"""Web agents: five small sites, MiniWoB++ and real sites behind one World, in Chromium or in a pure-Python page
model.
"""
