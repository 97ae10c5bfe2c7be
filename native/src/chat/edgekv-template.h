#pragma once

#include <string>

// throws for a template whose parts stand so deep within each other that reading it, or freeing
// what was read, would take more than the stack
void edgekv_chat_check_template(const std::string & text);
