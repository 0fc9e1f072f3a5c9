// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package chaosrun

import (
	"errors"
	"syscall"
)

var errNoNamespaces = errors.New("chaos: faults of the network need Linux")

func ownNetwork() *syscall.SysProcAttr { return nil }
func tryNamespaces() error             { return errNoNamespaces }
func wake() error                      { return errNoNamespaces }
func lossRules(int, []string) string   { return "" }
func lose(int, string) error           { return errNoNamespaces }
func dropped(int) (int, error)         { return 0, errNoNamespaces }
func keepAll(int) error                { return errNoNamespaces }
func timers(int) (int, error)          { return 0, errNoNamespaces }
