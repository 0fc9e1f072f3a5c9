// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package once_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"path/filepath"

	"github.com/stormguard-mq/stormguard/once"
	"github.com/stormguard-mq/stormguard/once/bolt"
)

// file is a file in a directory that clean removes.
func file() (path string, clean func()) {
	dir, err := os.MkdirTemp("", "once")
	if err != nil {
		log.Fatal(err)
	}
	return filepath.Join(dir, "once.db"), func() { _ = os.RemoveAll(dir) }
}

// A message that is delivered three times: the first attempt fails, the second charges, and
// the third finds the mark.
func Example() {
	path, clean := file()
	defer clean()
	marks, err := bolt.Open(path, bolt.Config{})
	if err != nil {
		log.Fatal(err)
	}
	defer marks.Close()
	charges, err := once.New(marks, once.Config{})
	if err != nil {
		log.Fatal(err)
	}
	bank := errors.New("the bank is away")
	handle := func(ctx context.Context, order string) error {
		return charges.Do(ctx, "charge/"+order, func(context.Context) error {
			if err := bank; err != nil {
				bank = nil
				return err
			}
			fmt.Println("charged", order)
			return nil
		})
	}
	for range 3 {
		fmt.Println(handle(context.Background(), "17"))
	}
	// Output:
	// the bank is away
	// charged 17
	// <nil>
	// <nil>
}

// The dependency is asked about an effect in doubt.
func ExampleWithLookup() {
	path, clean := file()
	defer clean()
	booked := make(map[string]bool) // at the bank
	open := func() (*bolt.Store, *once.Runner) {
		marks, err := bolt.Open(path, bolt.Config{})
		if err != nil {
			log.Fatal(err)
		}
		charges, err := once.New(marks, once.Config{}, once.WithLookup(func(_ context.Context, key string) (bool, error) {
			fmt.Println("asked about", key)
			return booked[key], nil
		}))
		if err != nil {
			log.Fatal(err)
		}
		return marks, charges
	}
	marks, charges := open()
	err := charges.Do(context.Background(), "charge/17", func(context.Context) error {
		booked["charge/17"] = true
		return fmt.Errorf("%w: no answer from the bank", once.ErrInDoubt)
	})
	fmt.Println(err)
	if err := marks.Close(); err != nil {
		log.Print(err)
		return
	}

	marks, charges = open() // the process starts anew
	defer marks.Close()
	err = charges.Do(context.Background(), "charge/17", func(context.Context) error {
		fmt.Println("charged again")
		return nil
	})
	fmt.Println(err)
	// Output:
	// once: effect in doubt: no answer from the bank
	// asked about charge/17
	// <nil>
}

func ExampleEntities() {
	path, clean := file()
	defer clean()
	marks, err := bolt.Open(path, bolt.Config{})
	if err != nil {
		log.Fatal(err)
	}
	defer marks.Close()
	runner, err := once.New(marks, once.Config{})
	if err != nil {
		log.Fatal(err)
	}
	machine, err := once.NewMachine("order", "created", map[string][]string{
		"created":   {"allocated", "cancelled"},
		"allocated": {"packed", "cancelled"},
		"packed":    {"shipped"},
	})
	if err != nil {
		log.Fatal(err)
	}
	orders, differences, err := once.NewEntities(context.Background(), runner, machine)
	fmt.Println("differences:", len(differences), err)
	for _, to := range []string{"allocated", "packed", "allocated", "cancelled"} {
		err := orders.Step(context.Background(), "17", to, func(context.Context) error {
			fmt.Println("effect of", to)
			return nil
		})
		fmt.Println(to, err)
	}
	// Output:
	// differences: 0 <nil>
	// effect of allocated
	// allocated <nil>
	// effect of packed
	// packed <nil>
	// allocated <nil>
	// cancelled once: order "17": no step from "packed" to "cancelled"
}
