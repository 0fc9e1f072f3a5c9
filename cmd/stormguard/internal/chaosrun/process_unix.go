// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

//go:build unix

package chaosrun

import (
	"os"
	"syscall"
)

// freeze stops a process, and thaw lets it go on.
var freeze, thaw os.Signal = syscall.SIGSTOP, syscall.SIGCONT

// ownSession starts a process in a session of its own.
func ownSession() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setsid: true} }
