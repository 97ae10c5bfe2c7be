#pragma once
// Lines of edgekv's own: they reach standard error without -v, too.

void edgekv_say(const char * line);
