"""`slot-cache monitor`: slots, caches and events of a llama-server and of the plugin, in a terminal.

    logs.py      a line of llama-server's log -> an event
    model.py     what the dashboard knows, fed with events and readings
    view.py      what it knows -> lines for a terminal of a given size
    sources.py   where events and readings come from: the plugin, llama-server, a log file here or elsewhere
    keys.py      the keyboard, and a terminal that is left as it was found
    options.py   what to look at
    app.py       all of these together

The first three do no I/O and have no clock of their own.
"""
