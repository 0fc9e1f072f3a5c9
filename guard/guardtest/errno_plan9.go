// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guardtest

import "syscall"

// errRefused is the system's refusal of a connection.
const errRefused = syscall.ErrorString("connection refused")
