// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

//go:build !plan9

package guardtest

import "syscall"

// errRefused is the system's refusal of a connection.
const errRefused = syscall.ECONNREFUSED
