#pragma once
#include <math.h>  // metal-cpp counts on INFINITY from here
typedef double CFTimeInterval;
